"""Rows of loss runs as figures; the page or PNG files draw them."""
