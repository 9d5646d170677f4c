"""What a server of a language model is made of, apart from the web: sizes that are compiled,
batches of texts, requests and answers. Nothing here knows Ray; examples/serve.py does."""
