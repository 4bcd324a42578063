def write(page, subject, report):
    pass
