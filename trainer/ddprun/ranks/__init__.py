"""How ranks start, run and end."""
