//! Row data as `pgoutput` sends it (PostgreSQL manual, section 54.9, `TupleData`).

use bytes::Bytes;

/// The values of one row, in the column order of the last [`Relation`](crate::Relation) message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuple(pub Vec<Value>);

/// One column's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// SQL NULL.
    Null,
    /// A TOASTed value that the change did not touch; PostgreSQL does not send it again.
    UnchangedToast,
    /// The type's text form, in the client encoding. A slice of the received buffer.
    Text(Bytes),
    /// The type's binary send form. A slice of the received buffer.
    Binary(Bytes),
}

impl Tuple {
    /// Returns the value of the column with this index, counted from 0 among the published columns.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&Value> {
        self.0.get(index)
    }

    /// Returns how many columns there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is no column, which is so for a table without any.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the values in column order.
    pub fn iter(&self) -> std::slice::Iter<'_, Value> {
        self.0.iter()
    }
}

impl<'a> IntoIterator for &'a Tuple {
    type Item = &'a Value;
    type IntoIter = std::slice::Iter<'a, Value>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl FromIterator<Value> for Tuple {
    fn from_iter<I: IntoIterator<Item = Value>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

impl Value {
    /// Returns the bytes of either form, or `None` where none were sent.
    #[must_use]
    pub const fn as_bytes(&self) -> Option<&Bytes> {
        match self {
            Self::Text(bytes) | Self::Binary(bytes) => Some(bytes),
            Self::Null | Self::UnchangedToast => None,
        }
    }

    /// Returns the text form, or `None` where another or none was sent.
    #[must_use]
    pub const fn as_text(&self) -> Option<&Bytes> {
        match self {
            Self::Text(bytes) => Some(bytes),
            Self::Binary(_) | Self::Null | Self::UnchangedToast => None,
        }
    }

    /// Returns whether it is SQL NULL; an unchanged TOASTed value is not.
    #[must_use]
    pub const fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sent_values_have_bytes() {
        let bytes = Bytes::from_static(b"1");
        let tuple =
            Tuple(vec![Value::Null, Value::UnchangedToast, Value::Text(bytes.clone()), Value::Binary(bytes.clone())]);
        let all = [None, None, Some(&bytes), Some(&bytes)];
        assert_eq!(tuple.iter().map(Value::as_bytes).collect::<Vec<_>>(), all);
        let text = [None, None, Some(&bytes), None];
        assert_eq!(tuple.iter().map(Value::as_text).collect::<Vec<_>>(), text);
        assert_eq!(tuple.iter().map(Value::is_null).collect::<Vec<_>>(), [true, false, false, false]);
    }

    #[test]
    fn a_column_past_the_last_is_none() {
        let tuple = Tuple(vec![Value::Null]);
        assert_eq!(tuple.get(0), Some(&Value::Null));
        assert_eq!(tuple.get(1), None);
    }
}
