"""What the scripts share, in two wings on one ground: what measures ends in records, what reads begins there.

The folders and who may import whom: README.md, section Architecture.
"""
