//! TLS: from `sslmode` and certificate files to a verified session.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use waljet_pipeline::{Action, Fault};

use crate::connect::{ConnectOptions, SslMode};
use crate::error::TLS;

/// Makes a TLS session of a connection on which the server has agreed to it.
///
/// Certificates are read each time, so that renewed ones are taken without a restart.
pub(crate) async fn handshake(
    options: &ConnectOptions,
    host: &str,
    stream: TcpStream,
) -> Result<TlsStream<TcpStream>, Fault> {
    let config = client_config(options)?;
    let name = ServerName::try_from(host.to_owned())
        .map_err(|error| fault(format!("{host:?} cannot be a name in a certificate")).cause(error))?;
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(|error| handshake_fault(host, error))
}

fn client_config(options: &ConnectOptions) -> Result<ClientConfig, Fault> {
    let provider = Arc::new(ring::default_provider());
    let verifier: Arc<dyn ServerCertVerifier> = match (options.ssl_mode, &options.ssl_root_cert) {
        (SslMode::Disable | SslMode::Prefer, _) | (SslMode::Require, None) => {
            Arc::new(Unverified { provider: provider.clone() })
        }
        // As in libpq, `require` with a root certificate verifies against it.
        (SslMode::VerifyCa, root) | (SslMode::Require, root @ Some(_)) => {
            Arc::new(ChainOnly { roots: roots(root.as_deref())?, provider: provider.clone() })
        }
        (SslMode::VerifyFull, root) => {
            let roots = Arc::new(roots(root.as_deref())?);
            WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
                .build()
                .map_err(|error| fault("could not use the root certificates").cause(error))?
        }
    };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| fault("could not choose TLS versions").cause(error))?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let (Some(cert), Some(key)) = (&options.ssl_cert, &options.ssl_key) else {
        return Ok(builder.with_no_client_auth());
    };
    let key_der = PrivateKeyDer::from_pem_file(key).map_err(|error| {
        fault(format!("could not read the client key {}", key.display()))
            .hint("it has to be PEM and not encrypted")
            .cause(error)
    })?;
    builder
        .with_client_auth_cert(certificates(cert)?, key_der)
        .map_err(|error| fault(format!("could not use the client certificate {}", cert.display())).cause(error))
}

fn roots(path: Option<&Path>) -> Result<RootCertStore, Fault> {
    let mut roots = RootCertStore::empty();
    match path {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(path) => {
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| {
                    fault(format!("{} holds a certificate that cannot be a root", path.display())).cause(error)
                })?;
            }
        }
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let unread = |error| fault(format!("could not read the certificates in {}", path.display())).cause(error);
    let all = CertificateDer::pem_file_iter(path).map_err(unread)?.collect::<Result<Vec<_>, _>>().map_err(unread)?;
    if all.is_empty() { Err(fault(format!("{} holds no certificate", path.display()))) } else { Ok(all) }
}

fn handshake_fault(host: &str, error: std::io::Error) -> Fault {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        // A connection that breaks in the handshake says nothing about certificates.
        None => crate::error::lost("agree on TLS", error),
        Some(rustls::Error::InvalidCertificate(_)) => fault(format!("the certificate of {host} could not be verified"))
            .hint("sslrootcert has to hold the authority that signed it; verify-full needs the host's name in it")
            .cause(error),
        Some(_) => fault(format!("could not agree on TLS with {host}")).cause(error),
    }
}

fn fault(message: impl Into<String>) -> Fault {
    Fault::new(TLS, Action::Halt, message)
}

/// Takes any certificate: the session is encrypted, and that is all that is asked for.
#[derive(Debug)]
struct Unverified {
    provider: Arc<CryptoProvider>,
}

/// Verifies the signatures up to a root, the dates and the purpose, but not the name.
#[derive(Debug)]
struct ChainOnly {
    roots: RootCertStore,
    provider: Arc<CryptoProvider>,
}

/// Verifying who holds the key is the same whichever certificates are taken.
macro_rules! verify_handshake_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            verify_tls12_signature(message, cert, signature, &self.provider.signature_verification_algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            verify_tls13_signature(message, cert, signature, &self.provider.signature_verification_algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.provider.signature_verification_algorithms.supported_schemes()
        }
    };
}

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    verify_handshake_signatures!();
}

impl ServerCertVerifier for ChainOnly {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        rustls::client::verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(certificate)?,
            &self.roots,
            intermediates,
            now,
            self.provider.signature_verification_algorithms.all,
        )?;
        Ok(ServerCertVerified::assertion())
    }

    verify_handshake_signatures!();
}
