"""The only folder that uses deltalake and object stores: objects, data files, and commits to Delta tables."""
