"""The viewer: a local web page that shows traces, also large ones and those of a running job.

traces.py    open traces: the table of all records, single records
table.py     a few numbers of every record, and what the page draws of them
record.py    one microbatch of one layer
replays.py   traces planned again in the background
catalogue.py all open traces and reports, and the thread that reads them
api.py       answers to the requests of the page
server.py    the HTTP server, and the requests it refuses
export.py    the page as one HTML file, without a server
page/        HTML, styles and scripts
"""
