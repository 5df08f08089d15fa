"""Grid search over a Keras classifier: scikit-learn around Keras's own wrapper.

Run it in this folder: `KERAS_BACKEND=torch python with_keras.py`.
"""

import keras
from keras.wrappers import SKLearnClassifier
from network import create_model
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split


def compiled(X, y, learning_rate=0.01):  # noqa: N803 (Keras passes the data by these names)
    model = create_model(X.shape[1], y.shape[1])
    optimizer = keras.optimizers.Adam(learning_rate=learning_rate)
    model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])
    return model


x, y = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, random_state=0)

grid = GridSearchCV(
    SKLearnClassifier(compiled),
    {
        "model_kwargs": [{"learning_rate": rate} for rate in (0.001, 0.01)],
        "fit_kwargs": [{"epochs": 3, "verbose": 0, "batch_size": size} for size in (16, 64)],
    },
    cv=2,
)
grid.fit(x_train, y_train)
print("Best parameters:", grid.best_params_)
print("Test accuracy:", grid.score(x_test, y_test))
