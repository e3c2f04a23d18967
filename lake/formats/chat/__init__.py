"""Chats, calls and their tokens, as several formats have them, in the form that a lake keeps."""
