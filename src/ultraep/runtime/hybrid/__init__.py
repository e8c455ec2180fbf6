"""The data plane of several fast-link domains: mapped memory inside, messages between them."""
