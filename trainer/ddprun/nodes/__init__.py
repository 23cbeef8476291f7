"""How nodes meet and agree."""
