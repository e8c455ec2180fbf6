"""Parts of all reports. A report is one HTML file with interactive plots that loads nothing.

page.py      the file, from page.html, page.css, parts.js and figures.js, which the viewer shares;
             every report has its own sections (demo.html) and figures (demo.js)
numbers.py   numbers of plots, ready for JSON
words.py     sizes, counts and tables as text

Reports need plotly: pip install '.[view]' in the clone of ultraep.
"""
