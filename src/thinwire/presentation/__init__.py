"""Tables, charts and pages as data, which a terminal, Markdown, a page or a picture renders."""
