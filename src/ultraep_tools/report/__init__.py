"""Parts of pages with interactive plots, and words of all commands.

page.py      plotly.js and the files of a page; parts.js and figures.js draw its plots
numbers.py   numbers of plots, ready for JSON
words.py     sizes and counts as text

Pages need plotly: pip install '.[view]' in the clone of ultraep.
"""
