"""What runs in the sandbox of reward functions, because it evaluates what models wrote.

This folder is on the path of the sandboxed process, so no file in it is called like a package.
"""
