//! A node's key as TLS sees it: a self-signed certificate, a certificate of a CA, or the bare key (RFC 7250).
//!
//! Whatever it is shown in, only the key counts: names are never checked, and dates only where a CA vouches.

use oap::NodeId;
use ron_kernel::key::PrivateKey;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible, RootCertStore,
    SignatureScheme,
};
use std::sync::Arc;
use webpki::{EndEntityCert, KeyUsage};

/// What stands before the 32 bytes of an Ed25519 key in a SubjectPublicKeyInfo (RFC 8410).
const SPKI: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
/// And before the 32 bytes of a private one in PKCS#8.
const PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

pub(crate) fn pkcs8(key: &PrivateKey) -> PrivatePkcs8KeyDer<'static> {
    PrivatePkcs8KeyDer::from([&PKCS8[..], &key.seed()[..]].concat())
}

/// The key, shown in these certificates.
pub(crate) fn certified(
    key: &PrivateKey,
    shown: Vec<CertificateDer<'static>>,
    provider: &CryptoProvider,
) -> Result<Arc<CertifiedKey>, Error> {
    let signing = provider.key_provider.load_private_key(PrivateKeyDer::Pkcs8(pkcs8(key)))?;
    Ok(Arc::new(CertifiedKey::new(shown, signing)))
}

/// A certificate that says nothing but the key.
pub(crate) fn self_signed(key: &PrivateKey) -> Result<CertificateDer<'static>, rcgen::Error> {
    let pair = rcgen::KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8(key), &rcgen::PKCS_ED25519)?;
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::CommonName, key.public().to_string());
    Ok(params.self_signed(&pair)?.der().clone())
}

/// The bare key, in the place where a certificate would be.
pub(crate) fn raw(key: &PrivateKey) -> CertificateDer<'static> {
    CertificateDer::from([&SPKI[..], &key.public().0[..]].concat())
}

/// The key that a peer has shown; none if it is no Ed25519 key.
pub(crate) fn node_of(shown: &CertificateDer<'_>, is_raw: bool) -> Option<NodeId> {
    let from_spki = |spki: &[u8]| {
        let key = spki.strip_prefix(&SPKI)?;
        <[u8; 32]>::try_from(key).ok().map(NodeId)
    };
    if is_raw {
        return from_spki(shown);
    }
    from_spki(&EndEntityCert::try_from(shown).ok()?.subject_public_key_info())
}

/// Takes any Ed25519 key that its owner proves to have; with a CA only what that has signed.
#[derive(Debug)]
pub(crate) struct KeyVerifier {
    pub(crate) provider: Arc<CryptoProvider>,
    pub(crate) ca: Option<Arc<RootCertStore>>,
    pub(crate) raw: bool,
}

impl KeyVerifier {
    fn check(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
        usage: KeyUsage,
    ) -> Result<(), Error> {
        node_of(shown, self.raw).ok_or(Error::InvalidCertificate(CertificateError::BadEncoding))?;
        let Some(ca) = &self.ca else { return Ok(()) };
        let bad = |error: webpki::Error| {
            let why = match error {
                webpki::Error::CertExpired { .. } => CertificateError::Expired,
                webpki::Error::CertNotValidYet { .. } => CertificateError::NotValidYet,
                webpki::Error::UnknownIssuer => CertificateError::UnknownIssuer,
                _ => CertificateError::ApplicationVerificationFailure,
            };
            Error::InvalidCertificate(why)
        };
        let certificate = EndEntityCert::try_from(shown).map_err(bad)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        certificate.verify_for_usage(algorithms, &ca.roots, between, now, usage, None, None).map_err(bad)?;
        Ok(())
    }

    fn signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        if self.raw {
            let spki = SubjectPublicKeyInfoDer::from(shown.as_ref());
            return verify_tls13_signature_with_raw_key(message, &spki, signed, algorithms);
        }
        verify_tls13_signature(message, shown, signed, algorithms)
    }
}

/// TLS 1.2 is never offered.
fn no_tls12() -> Error {
    Error::PeerIncompatible(PeerIncompatible::Tls12NotOfferedOrEnabled)
}

impl ServerCertVerifier for KeyVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity, intermediates, now, KeyUsage::server_auth())?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        self.raw
    }
}

impl ClientCertVerifier for KeyVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity, intermediates, now, KeyUsage::client_auth())?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        self.raw
    }
}
