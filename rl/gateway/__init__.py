"""Server with the API of OpenAI, which captures conversations token for token."""
