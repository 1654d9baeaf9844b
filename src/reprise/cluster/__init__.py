"""Several machines: one model split over ranks (`ranks`), and replicas of a server on Ray Serve (`replicas`).

A wing: nothing of the server imports it. The command line starts it when it is asked for.
"""
