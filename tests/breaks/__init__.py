"""Deliberate breaks of the product, and a command that shows that the tests find them."""
