"""HTML reports: self-contained pages.

`page_contents` chooses the content of a page, and `rendering` renders it with `page.html`,
`style.css` and `page.js` (figures and colours only).

Names in a log may come from any program. The template therefore escapes every text, the figures escape plotly's
labels, and the page's Content Security Policy allows only its own scripts to run, and nothing to load.
"""
