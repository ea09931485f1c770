"""Random faults at random moments, and a judge: right bits, or an error that names a faulty process in time."""
