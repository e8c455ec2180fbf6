"""The viewer: a local web page that shows traces of any size, also while a job writes them.

traces.py    open traces: the table of all records, single records
table.py     a few numbers of every record, the numbers of the plots and of one record
catalogue.py all open traces and reports, and the thread that reads them
api.py       answers to the requests of the page, replays, the page as one HTML file
server.py    the HTTP server
page/        HTML, styles and scripts
"""
