"""Reading: snapshots, which rows are visible, scans, SQL, and one episode as text."""
