//! `--ascii`: the ASCII equivalents of the other characters that screens and pages use.

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
        '▶' | '▸' | '→' | '≥' => '>',
        '←' | '≤' => '<',
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_beyond_ascii_is_left() {
        let text: String = "├●┤✕∞⣿⠁▅é─━ a\x1b".chars().map(to_ascii).collect();
        assert_eq!(text, "[o]xi#.+?-= a\x1b");
    }
}
