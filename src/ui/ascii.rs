//! Output in ASCII: the equivalents of the other characters that screens and pages use, and the terminals that need
//! them.

/// The ASCII equivalent of a character; `?` if it has none, as in generated text.
pub(crate) fn to_ascii(c: char) -> char {
    match c {
        _ if c.is_ascii() => c,
        '─' | '┄' | '⠒' | '⠤' | '▷' | '–' | '−' => '-',
        '│' | '┊' | '┃' => '|',
        '├' => '[',
        '┤' => ']',
        '┌' | '┐' | '└' | '┘' | '┴' | '┬' | '┼' | '▅' | '▆' => '+',
        '∙' | '·' | '○' | '▁' | '▂' => '.',
        '◆' | '◐' => '*',
        '✕' | '×' => 'x',
        '✓' => 'y',
        '▾' => 'v',
        '▴' | '▲' => '^',
        '●' => 'o',
        '▶' | '▸' | '→' => '>',
        '←' => '<',
        '‖' | '━' => '=',
        '■' | '▇' | '█' => '#',
        '…' | '±' => '~',
        '⏎' => '/',
        '°' => '\'',
        '▃' | '▄' => ':',
        '░' => '_',
        '∞' => 'i',
        'π' => 'p',
        'Σ' => 'S',
        'Φ' => 'F',
        braille @ '\u{2800}'..='\u{28ff}' => match (braille as u32 & 0xff).count_ones() {
            0 => ' ',
            1 | 2 => '.',
            3 | 4 => ':',
            _ => '#',
        },
        _ => '?',
    }
}

/// Whether this process's locale has an encoding other than UTF-8.
pub(super) fn locale_lacks_unicode() -> bool {
    lacks_unicode(|name| std::env::var(name).ok())
}

/// The first variable that is not empty decides, as for `setlocale`. Containers often set none, but their terminals
/// have UTF-8.
fn lacks_unicode(env: impl Fn(&str) -> Option<String>) -> bool {
    let mut locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(env).filter(|locale| !locale.is_empty());
    locale.next().is_some_and(|locale| !locale.to_lowercase().replace('-', "").contains("utf8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_locale_without_utf_8_needs_ascii() {
        let lacks = |variables: &[(&str, &str)]| {
            let value =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            lacks_unicode(value)
        };
        for locale in ["C", "POSIX", "en_US", "de_DE.ISO-8859-1", "de_DE@euro"] {
            assert!(lacks(&[("LANG", locale)]), "{locale}");
        }
        for locale in ["C.UTF-8", "en_US.utf8", "UTF-8", "de_DE.UTF-8@euro"] {
            assert!(!lacks(&[("LANG", locale)]), "{locale}");
        }
        assert!(lacks(&[("LANG", "C.UTF-8"), ("LC_CTYPE", "C")]));
        assert!(!lacks(&[("LANG", "C"), ("LC_CTYPE", "POSIX"), ("LC_ALL", "C.UTF-8")]));
        assert!(lacks(&[("LC_ALL", ""), ("LANG", "C")]));
        assert!(!lacks(&[("LC_ALL", "")]) && !lacks(&[]));
    }

    #[test]
    fn nothing_beyond_ascii_is_left() {
        let text: String = "├●┤✕∞⣿⠁▅é─━ a\x1b".chars().map(to_ascii).collect();
        assert_eq!(text, "[o]xi#.+?-= a\x1b");
    }
}
