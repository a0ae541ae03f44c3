//! Text that people wrote, made harmless for a screen: job names come from whoever may push.
//!
//! Control and bidi characters could move the cursor or turn the text around; they are shown as what they are. Markup is the
//! templates' to escape.

/// The same text, every character of it visible.
pub fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        let moves = c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{061c}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{2028}' | '\u{2029}' | '\u{feff}');
        if moves {
            safe.extend(c.escape_unicode());
        } else {
            safe.push(c);
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_move_the_cursor_is_shown_as_what_it_is() {
        assert_eq!(printable("a\u{1b}[2Jb\nc\u{202e}d é 日本"), "a\\u{1b}[2Jb\\u{a}c\\u{202e}d é 日本");
    }
}
