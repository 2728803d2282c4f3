//! Checks of the HTML pages that the program writes.

/// Asserts that every tag is closed, in order, and that every attribute is quoted. Checks not all of XML, but the parts
/// that a mistake here would break.
pub(crate) fn assert_well_formed(html: &str) {
    let mut open = Vec::new();
    let body = html.strip_prefix("<!DOCTYPE html>\n").unwrap();
    for (at, _) in body.match_indices('<') {
        let end = body[at..].find('>').map(|end| at + end).expect("a tag ends");
        let tag = &body[at + 1..end];
        assert!(tag.matches('"').count().is_multiple_of(2), "{tag}");
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        assert!(!name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric()), "<{tag}>");
        if let Some(closed) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(closed));
        } else if !tag.ends_with('/') {
            open.push(name.to_owned());
        }
    }
    assert_eq!(open, [""; 0]);
}

/// Nothing is fetched, nothing runs.
pub(crate) fn assert_stands_alone(html: &str) {
    for forbidden in ["<script", "src=", "href=", "url(", "@import", "alert('"] {
        assert!(!html.contains(forbidden), "{forbidden}");
    }
    let without_namespace = html.replace("http://www.w3.org/1999/xhtml", "");
    assert!(!without_namespace.contains("http"), "something is fetched");
}
