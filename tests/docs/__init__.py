"""The site of documents, and the examples."""
