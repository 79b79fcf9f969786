"""HTML reports: self-contained pages.

`run_page` and `comparison_pages` choose the content of a page, `sections` makes its sections of tables and figures, and
`page` renders it with `page.html`, `style.css` and `page.js`; `embedding` makes scripts and data safe to embed.

Names in a log come from any program: the template escapes every text, plotly's labels are escaped in the figures, and
the page's Content Security Policy lets nothing run or load but its own scripts.
"""
