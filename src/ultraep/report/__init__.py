"""What all reports are made of: one HTML file with interactive plots, and nothing to load.

page.py      the file; page.html, page.css and parts.js are its parts, a report adds its figures
numbers.py   what plots draw, ready for JSON
rows.py      measured numbers to keep, for machines
words.py     numbers, names and tables as text

plotly: pip install 'ultraep[plot]'.
"""
