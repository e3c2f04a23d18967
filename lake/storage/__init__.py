"""The only room that touches deltalake and object stores: objects, data files, and commits to Delta tables."""
