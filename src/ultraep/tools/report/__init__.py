"""What all reports are made of: one HTML file with interactive plots that loads nothing.

page.py      the file; page.html, page.css, parts.js and figures.js are its parts, which the viewer
             uses as well; demo.js, inspect.js and serving.js hold the figures of one report each
numbers.py   what plots draw, ready for JSON
rows.py      measured numbers to keep, for machines
words.py     numbers, names and tables as text

plotly: pip install 'ultraep[plot]'.
"""
