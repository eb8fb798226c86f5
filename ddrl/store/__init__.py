"""All that is kept on the server, one noun a file; the only package that imports redis (beside `ddrl.embedded`)."""
