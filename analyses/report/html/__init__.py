"""HTML reports: self-contained pages.

`page_contents` chooses the content of a page, and `rendering` renders it with `page.html`, `style.css` and `page.js`.

Names in a log come from any program: the template escapes every text, plotly's labels are escaped in the figures, and
the page's Content Security Policy lets nothing run or load but its own scripts.
"""
