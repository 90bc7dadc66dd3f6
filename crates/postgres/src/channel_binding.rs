//! The channel binding `tls-server-end-point` (RFC 5929): a digest of the server's certificate.
//!
//! ```text
//! Certificate ::= SEQUENCE { tbsCertificate SEQUENCE, signatureAlgorithm SEQUENCE { OID, … }, … }
//! ```

use rustls::crypto::hash::Hash;
use rustls::crypto::ring::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384};

const SEQUENCE: u8 = 0x30;
const OBJECT_IDENTIFIER: u8 = 0x06;

/// `sha256WithRSAEncryption` and its neighbours, 1.2.840.113549.1.1, without the last number.
const RSA: &[u8] = &[0x2A, 0x86, 0x48, 0x86, 0xF7, 0x0D, 0x01, 0x01];
/// `ecdsa-with-SHA2`, 1.2.840.10045.4.3, without the last number.
const ECDSA: &[u8] = &[0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x04, 0x03];

/// Returns the digest of a DER certificate, by the hash that it is signed with.
///
/// `None` for signatures whose hash is not known here (SHA-512, Ed25519, PSS): then the password is
/// proved without binding it to the channel, as libpq does too where it cannot tell the hash.
pub(crate) fn server_end_point(certificate: &[u8]) -> Option<Vec<u8>> {
    let (body, _) = element(certificate, SEQUENCE)?;
    let (_, rest) = element(body, SEQUENCE)?;
    let (algorithm, _) = element(rest, SEQUENCE)?;
    let (oid, _) = element(algorithm, OBJECT_IDENTIFIER)?;
    let (last, prefix) = oid.split_last()?;
    // MD5 and SHA-1 are replaced by SHA-256 (RFC 5929, section 4.1).
    let hash = match (prefix, last) {
        (RSA, 4 | 5 | 11) | (ECDSA, 2) => sha256()?,
        (RSA, 12) | (ECDSA, 3) => sha384()?,
        _ => return None,
    };
    Some(hash.hash(certificate).as_ref().to_vec())
}

fn sha256() -> Option<&'static dyn Hash> {
    TLS13_AES_128_GCM_SHA256.tls13().map(|suite| suite.common.hash_provider)
}

fn sha384() -> Option<&'static dyn Hash> {
    TLS13_AES_256_GCM_SHA384.tls13().map(|suite| suite.common.hash_provider)
}

/// Splits the first element off, which has to have the tag.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    if found != tag {
        return None;
    }
    // A length of 128 or more is given in as many bytes as the low bits of the first one say.
    let (len, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        let (len, rest) = rest.split_at_checked(usize::from(first & 0x7F))?;
        if len.len() > 4 {
            return None;
        }
        (len.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), rest)
    };
    rest.split_at_checked(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(oid: &[u8]) -> Vec<u8> {
        let mut algorithm = vec![OBJECT_IDENTIFIER, oid.len() as u8];
        algorithm.extend(oid);
        let mut body = vec![SEQUENCE, 0x81, 1, 7, SEQUENCE, algorithm.len() as u8];
        body.extend(algorithm);
        let mut all = vec![SEQUENCE, body.len() as u8];
        all.extend(body);
        all
    }

    #[test]
    fn the_hash_follows_the_signature_of_the_certificate() {
        let len = |prefix: &[u8], last: u8| {
            server_end_point(&certificate(&[prefix, &[last]].concat())).map(|digest| digest.len())
        };
        assert_eq!(len(RSA, 5), Some(32));
        assert_eq!(len(RSA, 11), Some(32));
        assert_eq!(len(RSA, 12), Some(48));
        assert_eq!(len(RSA, 13), None);
        assert_eq!(len(ECDSA, 2), Some(32));
        assert_eq!(len(ECDSA, 3), Some(48));
    }

    #[test]
    fn any_cut_certificate_has_no_digest() {
        let whole = certificate(&[RSA, &[11]].concat());
        for end in 0..whole.len() {
            assert_eq!(server_end_point(&whole[..end]), None, "{end}");
        }
    }
}
