"""What each implementation does in every corner: the questions, the judge, the processes and the matrix."""
