"""What all reports are made of: one HTML file with interactive plots, and nothing to load.

page.py      the file; page.html, page.css, parts.js and figures.js are its parts, which the viewer
             has as well; a report adds its own figures
numbers.py   what plots draw, ready for JSON
rows.py      measured numbers to keep, for machines
words.py     numbers, names and tables as text

plotly: pip install 'ultraep[plot]'.
"""
