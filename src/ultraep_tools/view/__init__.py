"""The viewer: a local web page that shows traces of any size, also while a job writes them.

traces.py    open traces: the table of all records, single records
table.py     a few numbers of every record, the numbers of the plots and of one record
catalogue.py the open traces by name, and the thread that reads them
api.py       answers to the requests of the page; the page as one HTML file
server.py    the HTTP server
page/        HTML, styles and scripts
"""
