"""Tables, charts and pages: what is shown to people, as data that a terminal, Markdown, a page or a picture renders."""
