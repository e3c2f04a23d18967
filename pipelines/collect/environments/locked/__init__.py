"""Code that runs in the sandbox of reward functions, because it evaluates text that models wrote.

This folder is on the import path of the sandboxed process, so no file in it may have the name of a package.
"""
