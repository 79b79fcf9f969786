"""The report as one page that needs no network: `page` fills `page.html`, with `style.css` and `page.js`.

Names in a log come from a program that nobody has checked: the template escapes every text, plotly's labels are escaped
in the figures, and the page's own policy lets nothing run or load but what the page was made with.
"""
