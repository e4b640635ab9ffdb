"""Widgets that draw columns, strips, maps and logs; none of them knows a session."""
