"""A run as one HTML file, made to be mailed: no script in it, nothing that is fetched. Pure: values in, text out."""

from ddpctl.report.page import page as page
