"""How commands run, here and on other machines."""
