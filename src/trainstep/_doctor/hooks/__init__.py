"""What watches the libraries that a script imports, one file or a few for each.

No file here imports a library: hooks are put in place when the script does.
"""
