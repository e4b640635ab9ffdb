"""The workbench: the only part of klbench that imports Textual.

It draws what the event log says and sends small commands; it owns no server and no measurement, so a crash
of the screen costs nothing.
"""
