"""The viewer: a local web page that shows traces of any size, also while a job writes them.

traces.py    open traces: the table of all records, single records
table.py     a few numbers of every record, and the numbers of the plots
record.py    one microbatch of one layer
replays.py   plans the loads of a trace again, in the background
catalogue.py all open traces and reports, and the thread that reads them
api.py       answers to the requests of the page
server.py    the HTTP server
export.py    the page as one HTML file, without a server
page/        HTML, styles and scripts
"""
