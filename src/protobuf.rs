//! Encodes messages as protocol buffers, for ONNX graphs and TensorBoard's event files:
//! <https://protobuf.dev/programming-guides/encoding>.

/// A message under construction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Message(Vec<u8>);

impl Message {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Appends an integer field.
    pub(crate) fn int(mut self, field: u32, value: i64) -> Self {
        self.varint(u64::from(field) << 3);
        self.varint(value as u64);
        self
    }

    /// Appends a field of type float.
    pub(crate) fn float(mut self, field: u32, value: f32) -> Self {
        self.varint(u64::from(field) << 3 | 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Appends a field of type double.
    pub(crate) fn double(mut self, field: u32, value: f64) -> Self {
        self.varint(u64::from(field) << 3 | 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Appends a packed repeated field of type double.
    pub(crate) fn doubles(self, field: u32, values: &[f64]) -> Self {
        self.put(field, values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Appends a field of type string or bytes.
    pub(crate) fn put(mut self, field: u32, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref();
        self.varint(u64::from(field) << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    /// Appends a message as a field.
    pub(crate) fn message(self, field: u32, value: &Self) -> Self {
        self.put(field, value.bytes())
    }

    /// Appends a repeated field.
    pub(crate) fn each<T>(self, values: impl IntoIterator<Item = T>, put: impl Fn(Self, T) -> Self) -> Self {
        values.into_iter().fold(self, put)
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of the encoding's description.
    #[test]
    fn fields_are_encoded_as_described() {
        assert_eq!(Message::default().int(1, 150).bytes(), [0x08, 0x96, 0x01]);
        assert_eq!(Message::default().put(2, "testing").bytes(), b"\x12\x07testing");
        let inner = Message::default().int(1, 150);
        assert_eq!(Message::default().message(3, &inner).bytes(), [0x1a, 0x03, 0x08, 0x96, 0x01]);
        let minus_two = Message::default().int(1, -2);
        assert_eq!(minus_two.bytes(), [0x08, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]);
        assert_eq!(Message::default().float(1, 1.0).bytes(), [0x0d, 0, 0, 0x80, 0x3f]);
        assert_eq!(Message::default().double(2, 1.0).bytes(), [0x11, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f]);
        assert_eq!(Message::default().int(2, 300).doubles(3, &[0.0]).bytes()[..5], [0x10, 0xac, 0x02, 0x1a, 0x08]);
    }
}
