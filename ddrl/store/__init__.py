"""All that is kept on the server, one noun a file; beside `ddrl.embedded` the only importer of redis."""
