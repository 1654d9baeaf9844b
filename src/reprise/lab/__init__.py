"""The lab: what measures a server and shows it, `reprise bench`, `reprise simulate` and `reprise demo`.

A wing: nothing of the server imports it. The command line imports each command when it is asked for (`cli/main.py`).
"""
