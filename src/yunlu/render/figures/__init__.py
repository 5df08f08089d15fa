"""Figures as data: values that the page, matplotlib or a browser draws."""
