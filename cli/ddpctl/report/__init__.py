"""A run as one HTML file that can be mailed: no script in it, nothing that is fetched. Pure: values in, text out."""
