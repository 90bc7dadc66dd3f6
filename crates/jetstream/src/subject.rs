//! What subjects a filter takes (NATS manual, "Subject-Based Messaging").

/// Returns whether every subject that `inner` takes is taken by `outer`.
pub(crate) fn covers(outer: &str, inner: &str) -> bool {
    let (mut outer, mut inner) = (outer.split('.'), inner.split('.'));
    loop {
        match (outer.next(), inner.next()) {
            (None, None) => return true,
            (Some(">"), Some(_)) => return true,
            (Some(_), Some(">")) | (Some(_), None) | (None, Some(_)) => return false,
            (Some("*"), Some(_)) => {}
            (Some(a), Some(b)) if a == b => {}
            (Some(_), Some(_)) => return false,
        }
    }
}

/// Returns whether some subject is taken by both filters.
pub(crate) fn overlap(a: &str, b: &str) -> bool {
    let (mut a, mut b) = (a.split('.'), b.split('.'));
    loop {
        match (a.next(), b.next()) {
            (None, None) => return true,
            (Some(">"), Some(_)) | (Some(_), Some(">")) => return true,
            (Some(_), None) | (None, Some(_)) => return false,
            (Some(x), Some(y)) if x == "*" || y == "*" || x == y => {}
            (Some(_), Some(_)) => return false,
        }
    }
}

/// Returns a concrete subject below `filter` that no event is routed to.
pub(crate) fn probe(filter: &str) -> String {
    let token = |token| match token {
        "*" => "waljet-check",
        ">" => "waljet-check.permission",
        literal => literal,
    };
    filter.split('.').map(token).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_covers_what_it_takes_and_no_more() {
        for (outer, inner) in
            [("a.>", "a.b"), ("a.>", "a.b.c"), (">", "a"), ("a.*", "a.b"), ("a.>", "a.>"), ("a.>", "a.*.c")]
        {
            assert!(covers(outer, inner), "{outer} {inner}");
        }
        for (outer, inner) in
            [("a.>", "a"), ("a.*", "a.b.c"), ("a.*", "a.>"), ("a.b", "a.*"), ("a.b", "a.c"), ("a", "a.b")]
        {
            assert!(!covers(outer, inner), "{outer} {inner}");
        }
    }

    #[test]
    fn filters_overlap_where_one_subject_fits_both() {
        for (a, b) in [("a.*", "*.b"), ("a.>", "a.b.c"), (">", "x"), ("a.*.c", "a.b.>")] {
            assert!(overlap(a, b) && overlap(b, a), "{a} {b}");
        }
        for (a, b) in [("a.>", "b.>"), ("a.*", "a"), ("a.b", "a.c")] {
            assert!(!overlap(a, b) && !overlap(b, a), "{a} {b}");
        }
    }

    #[test]
    fn a_probe_lies_below_its_filter() {
        for filter in ["outbox.>", "outbox.*.created", "outbox.*.*", "outbox"] {
            assert!(covers(filter, &probe(filter)), "{filter}");
        }
    }
}
