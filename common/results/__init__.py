"""Records and traces on disk to rows, tables and exports.  Never imports torch."""
