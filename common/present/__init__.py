"""Tables, figures and sections: what shows things and knows no record."""
